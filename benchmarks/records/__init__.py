"""Cases, their records on disk, and the environment of these records."""
