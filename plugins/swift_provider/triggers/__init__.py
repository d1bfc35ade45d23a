"""What follows a gang while its task is deferred: one trigger per run."""
