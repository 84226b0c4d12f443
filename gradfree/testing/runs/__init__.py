"""Training a case in Lightning, in Fabric and on several ranks."""
