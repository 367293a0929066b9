"""What a cluster would do with a trace of requests: engines are modelled, the cache manager's decisions are real."""
