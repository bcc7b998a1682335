"""The model of a virtual rank, with real tensors or as sizes."""
