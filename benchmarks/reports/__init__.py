"""Reports as files, and record sets side by side."""
