"""Floor above the store: what keeps it sound, small and in order, and looks into what it holds. No sandboxes."""
