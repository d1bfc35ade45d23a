"""The YAML files that a user edits: recipes and clusters, their models and the error messages that users see."""

from swift_provider.config.checkpoints import CheckpointPolicy, KeepBest, Retention, Storage
from swift_provider.config.cluster import Cluster, Node
from swift_provider.config.docker import Docker
from swift_provider.config.errors import ConfigError, Fault
from swift_provider.config.loading import list_clusters, list_recipes, load_cluster, load_recipe
from swift_provider.config.network import Network
from swift_provider.config.recipe import Recipe, SwiftSection

__all__ = [
    "CheckpointPolicy",
    "Cluster",
    "ConfigError",
    "Docker",
    "Fault",
    "KeepBest",
    "Network",
    "Node",
    "Recipe",
    "Retention",
    "Storage",
    "SwiftSection",
    "list_clusters",
    "list_recipes",
    "load_cluster",
    "load_recipe",
]
