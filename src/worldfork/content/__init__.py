"""Floor between records and the store: trees of files on disk, as entries, manifests and merged views. No database."""
