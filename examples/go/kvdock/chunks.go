package kvdock

import (
	"context"
	"io"

	pb "github.com/kvdock/kvdock/gen/go/kvdock/v1"
	"google.golang.org/protobuf/proto"
)

// PutChunks stores the bytes of the chunks that open names and says what became of each. Bytes that
// the server has are not sent, and what is too long for one opening message is put in several parts.
func (c *Client) PutChunks(ctx context.Context, open *pb.PutOpen, chunks [][]byte) ([]pb.ChunkStatus, error) {
	var statuses []pb.ChunkStatus
	for first := 0; first < len(chunks); first = len(statuses) {
		part := proto.Clone(open).(*pb.PutOpen)
		part.Keys, part.EventData = nil, nil
		size := 0
		for i := first; i < len(chunks) && len(part.Keys) < 16384 && size < 2<<20; i++ {
			part.Keys = append(part.Keys, open.Keys[i])
			if size += 40; len(open.EventData) > 0 {
				part.EventData = append(part.EventData, open.EventData[i])
				size += proto.Size(open.EventData[i])
			}
		}
		if first > 0 {
			part.ParentKey = open.Keys[first-1]
		}
		some, err := c.put(ctx, part, chunks[first:first+len(part.Keys)])
		if err != nil {
			return statuses, err
		}
		statuses = append(statuses, some...)
	}
	return statuses, nil
}

func (c *Client) put(ctx context.Context, open *pb.PutOpen, chunks [][]byte) ([]pb.ChunkStatus, error) {
	ctx, cancel := context.WithCancel(ctx)
	defer cancel()
	stream, err := c.Put(ctx)
	if err != nil {
		return nil, err
	}
	stream.Send(&pb.PutRequest{Message: &pb.PutRequest_Open{Open: open}}) // if it fails, Recv says why
	statuses := make([]pb.ChunkStatus, len(chunks))                       // UNSPECIFIED is a failure
	for {
		response, err := stream.Recv()
		if err == io.EOF {
			return statuses, nil
		} else if err != nil {
			return nil, err
		}
		if admission := response.GetAdmission(); admission != nil {
			go send(stream, admission.Chunks, chunks)
		} else if result := response.GetResult(); result != nil {
			statuses[result.Chunk] = result.Status
		}
	}
}

func send(stream pb.CacheService_PutClient, admitted []*pb.ChunkResult, chunks [][]byte) {
	for i, data := range chunks {
		for admitted[i].Status == pb.ChunkStatus_CHUNK_STATUS_RESERVED && len(data) > 0 {
			n := 128 << 10
			if n > len(data) {
				n = len(data)
			}
			message := &pb.PutRequest_Data{Data: &pb.PutData{Chunk: uint32(i), Data: data[:n]}}
			if stream.Send(&pb.PutRequest{Message: message}) != nil {
				return
			}
			data = data[n:]
		}
	}
	stream.CloseSend()
}

// GetChunks fetches chunks, up to the first that is not there.
func (c *Client) GetChunks(ctx context.Context, get *pb.GetRequest) ([][]byte, error) {
	stream, err := c.Get(ctx, get)
	if err != nil {
		return nil, err
	}
	var chunks [][]byte
	for {
		response, err := stream.Recv()
		if err == io.EOF || err == nil && response.Status != pb.ChunkStatus_CHUNK_STATUS_RETRIEVED {
			return chunks, nil
		} else if err != nil {
			return nil, err
		}
		if int(response.Chunk) == len(chunks) {
			chunks = append(chunks, make([]byte, 0, response.ShardBytes))
		}
		chunks[response.Chunk] = append(chunks[response.Chunk], response.Data...)
	}
}
