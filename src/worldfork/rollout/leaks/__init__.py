"""Looking for the answer in a world before policies do."""
