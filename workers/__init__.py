"""The data plane: engine loop, scheduler, sampler and one actor for each rank."""
