package kvdock

import (
	"bytes"
	"context"
	"io"

	pb "github.com/kvdock/kvdock/gen/go/kvdock/v1"
	"google.golang.org/protobuf/proto"
)

// PutChunks stores the bytes of the chunks that open names and says what became of each. Bytes that
// the server has are not sent, and what is too long for one opening message is put in several parts.
func (c *Client) PutChunks(ctx context.Context, open *pb.PutOpen, chunks [][]byte) (statuses []pb.ChunkStatus, err error) {
	told := len(open.EventData) > 0
	first, end, parent := 0, 0, open.ParentKey
	for ; first < len(chunks) && err == nil; first, parent = end, open.Keys[end-1] {
		for size := 0; end < len(chunks) && size < 2<<20; end++ {
			size += 128 // more than a key takes, so that one part has 16,384 of them at most
			if told {
				size += proto.Size(open.EventData[end])
			}
		}
		part := proto.Clone(open).(*pb.PutOpen)
		part.ParentKey, part.Keys = parent, open.Keys[first:end]
		if told {
			part.EventData = open.EventData[first:end]
		}
		var some []pb.ChunkStatus
		some, err = c.put(ctx, part, chunks[first:end])
		statuses = append(statuses, some...)
	}
	return statuses, err
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
	for i, chunk := range chunks {
		rest := bytes.NewBuffer(chunk)
		for admitted[i].Status == pb.ChunkStatus_CHUNK_STATUS_RESERVED && rest.Len() > 0 {
			data := &pb.PutData{Chunk: uint32(i), Data: rest.Next(128 << 10)}
			if stream.Send(&pb.PutRequest{Message: &pb.PutRequest_Data{Data: data}}) != nil {
				return
			}
		}
	}
	stream.CloseSend()
}

// GetChunks fetches chunks, up to the first that is not there.
func (c *Client) GetChunks(ctx context.Context, get *pb.GetRequest) (chunks [][]byte, err error) {
	stream, err := c.Get(ctx, get)
	if err != nil {
		return nil, err
	}
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
