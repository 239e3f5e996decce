module github.com/kvdock/kvdock/examples/go

go 1.24.0

// The stubs that run.sh makes.
replace github.com/kvdock/kvdock/gen/go => ./build/src/github.com/kvdock/kvdock/gen/go

require (
	github.com/kvdock/kvdock/gen/go v0.0.0
	google.golang.org/genproto/googleapis/rpc v0.0.0-20251029180050-ab9386a59fda
	google.golang.org/grpc v1.78.0
	google.golang.org/protobuf v1.36.10
)
