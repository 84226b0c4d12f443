"""``gradfree fit``: a LightningCLI with our engines, models and data."""
