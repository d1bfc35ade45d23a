"""Makes recipes from what people have: the command lines and scripts of guides. Pure."""
