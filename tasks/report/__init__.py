"""What a person sees of a run: its files, its progress line, trackers, dashboard artifacts and report."""
