"""Protocol buffers: the wire formats and the code that protoc makes of them. Types from here stay inside wire modules."""
