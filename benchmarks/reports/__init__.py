"""Reports: their contents, files and charts."""
