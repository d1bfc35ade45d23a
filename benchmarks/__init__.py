"""Each figure that the docs quote, with the peer measured in the same run."""
