"""Protocol buffers: the wire formats and the code that protoc makes of them; types from here stay in wire modules."""
