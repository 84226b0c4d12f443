"""Cases, their records on disk, and where these come from."""
