package kvdock

import (
	"context"
	"fmt"
	"net"
	"os"
	"strings"
	"sync"
	"syscall"
	"time"

	pb "github.com/kvdock/kvdock/gen/go/kvdock/v1"
	"google.golang.org/genproto/googleapis/rpc/errdetails"
	"google.golang.org/grpc"
	"google.golang.org/grpc/backoff"
	"google.golang.org/grpc/codes"
	"google.golang.org/grpc/keepalive"
	"google.golang.org/grpc/status"
)

// Client is a connection to the server at an address, and lives through the server's restarts. All
// calls of the protocol are its methods.
type Client struct {
	pb.CacheServiceClient
	pb.AdminServiceClient
	pb.EventServiceClient
	pb.SessionServiceClient
	conn *grpc.ClientConn
}

// Dial makes a client of the server at unix:///PATH or HOST:PORT. It connects with the first call.
func Dial(address string) (*Client, error) {
	dialer := func(ctx context.Context, _ string) (net.Conn, error) { return connect(ctx, address) }
	pings := keepalive.ClientParameters{Time: 10 * time.Second, Timeout: 10 * time.Second, PermitWithoutStream: true}
	retries := backoff.Config{BaseDelay: 100 * time.Millisecond, Multiplier: 1.6, Jitter: 0.2, MaxDelay: time.Second}
	conn, err := grpc.Dial("passthrough:///localhost", grpc.WithInsecure(), grpc.WithContextDialer(dialer),
		grpc.WithKeepaliveParams(pings), grpc.WithConnectParams(grpc.ConnectParams{Backoff: retries, MinConnectTimeout: 5 * time.Second}))
	return &Client{pb.NewCacheServiceClient(conn), pb.NewAdminServiceClient(conn),
		pb.NewEventServiceClient(conn), pb.NewSessionServiceClient(conn), conn}, err
}

// connect keeps away from a Unix socket at which a user listens who is neither root nor this one.
func connect(ctx context.Context, address string) (net.Conn, error) {
	path := strings.TrimPrefix(address, "unix://")
	if path == address {
		return new(net.Dialer).DialContext(ctx, "tcp", address)
	}
	conn, err := new(net.Dialer).DialContext(ctx, "unix", path)
	if err != nil {
		return nil, err
	}
	err = fmt.Errorf("cannot see who listens at %s", path)
	if raw, failed := conn.(*net.UnixConn).SyscallConn(); failed == nil {
		raw.Control(func(fd uintptr) {
			var peer *syscall.Ucred
			peer, err = syscall.GetsockoptUcred(int(fd), syscall.SOL_SOCKET, syscall.SO_PEERCRED)
			if err == nil && peer.Uid != 0 && int(peer.Uid) != os.Getuid() {
				err = fmt.Errorf("user %d listens at %s", peer.Uid, path)
			}
		})
	}
	return conn, err
}

// Close ends the connection and everything on it.
func (c *Client) Close() error { return c.conn.Close() }

// Reason gives the protocol's name for a failure, for example UNKNOWN_NAMESPACE, or "".
func Reason(err error) string {
	for _, detail := range status.Convert(err).Details() {
		if info, ok := detail.(*errdetails.ErrorInfo); ok && info.Domain == "kvdock" {
			return info.Reason
		}
	}
	return ""
}

// failure is the error that a call by itself would have, and nil for none.
func failure(e *pb.Error) error {
	if e == nil {
		return nil
	}
	s, _ := status.New(codes.Code(e.Code), e.Message).WithDetails(&errdetails.ErrorInfo{Domain: "kvdock", Reason: e.Reason, Metadata: e.Metadata})
	return s.Err()
}

// Session ties what it holds to its stream. When that ends, for example since the server does, Done
// is closed and all that it held is gone.
type Session struct {
	*pb.OpenResponse
	Done   chan struct{}
	err    error // why Done is closed
	cancel context.CancelFunc
	stream pb.SessionService_SessionClient
	mu     sync.Mutex // of sending, and of lastID
	lastID uint64
	calls  sync.Map // from ids to channels for the answers
}

// Open opens a session. While no server answers it tries again, until ctx ends.
func (c *Client) Open(ctx context.Context, open *pb.OpenRequest) (*Session, error) {
	for {
		streaming, cancel := context.WithCancel(context.Background())
		s := &Session{Done: make(chan struct{}), cancel: cancel}
		stream, err := c.Session(streaming)
		if s.stream = stream; err == nil {
			go s.receive()
			var answer *pb.SessionResponse
			if answer, err = s.Call(ctx, &pb.SessionRequest{Request: &pb.SessionRequest_Open{Open: open}}); err == nil {
				s.OpenResponse = answer.GetOpen()
				go s.beat()
				return s, nil
			}
		}
		cancel()
		if status.Code(err) != codes.Unavailable || ctx.Err() != nil {
			return nil, err
		}
		time.Sleep(100 * time.Millisecond)
	}
}

// Close ends the session's stream, and with it all that the session holds.
func (s *Session) Close() { s.cancel(); <-s.Done }

// Call sends a request and waits for its answer.
func (s *Session) Call(ctx context.Context, request *pb.SessionRequest) (*pb.SessionResponse, error) {
	answer := make(chan *pb.SessionResponse, 1)
	s.mu.Lock()
	s.lastID++
	request.Id = s.lastID
	s.calls.Store(request.Id, answer)
	s.stream.Send(request) // if it fails, receive hears why
	s.mu.Unlock()
	select {
	case response := <-answer:
		return response, failure(response.GetError())
	case <-ctx.Done():
		s.calls.Delete(request.Id)
		return nil, status.FromContextError(ctx.Err()).Err()
	case <-s.Done:
		return nil, s.err
	}
}

// Lookup says how many chunks, from the first on, are cached, and locks them for one reader.
func (s *Session) Lookup(ctx context.Context, namespace string, keys [][]byte) (*pb.LookupResponse, error) {
	lookup := &pb.LookupRequest{Namespace: namespace, Keys: keys}
	r, err := s.Call(ctx, &pb.SessionRequest{Request: &pb.SessionRequest_Lookup{Lookup: lookup}})
	return r.GetLookup(), err
}

// Free gives all locks of a lease back and says how many they were.
func (s *Session) Free(ctx context.Context, lease uint64) (uint32, error) {
	free := &pb.FreeLocksRequest{Locks: []*pb.LockRange{{LeaseId: lease}}}
	r, err := s.Call(ctx, &pb.SessionRequest{Request: &pb.SessionRequest_FreeLocks{FreeLocks: free}})
	if err != nil {
		return 0, err
	}
	return r.GetFreeLocks().Freed[0].Released, nil
}

func (s *Session) receive() {
	for {
		response, err := s.stream.Recv()
		if err != nil {
			s.err = err
			s.cancel()
			close(s.Done)
			return
		}
		if answer, ok := s.calls.LoadAndDelete(response.Id); ok {
			answer.(chan *pb.SessionResponse) <- response
		} else if lease := response.GetLookup().GetLeaseId(); lease != 0 {
			go s.Free(context.Background(), lease) // nobody waits for this lookup any more
		}
	}
}

func (s *Session) beat() {
	for err := error(nil); err == nil; {
		time.Sleep(time.Duration(s.TtlMs) * time.Millisecond / 3)
		beat := &pb.SessionRequest_Heartbeat{Heartbeat: &pb.HeartbeatRequest{}}
		_, err = s.Call(context.Background(), &pb.SessionRequest{Request: beat})
	}
}
