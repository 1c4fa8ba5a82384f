"""Floor above keeping: snapshots on their way to other homes and back, as archives and through remotes."""
