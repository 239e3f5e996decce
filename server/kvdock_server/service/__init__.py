"""The verbs that wait: for a copy, for a client's bytes, for another call.

Domain values in and out: nothing of protobuf or gRPC is known here. ``rpc`` turns messages into
these calls; ``core`` does at once what they decide.
"""
