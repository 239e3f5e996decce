"""The verbs that wait: for a copy, for a client's bytes, for another call.

Nothing here knows protobuf or gRPC. ``rpc`` turns messages into calls of this package, which in
turn calls ``core``, where nothing waits.
"""
