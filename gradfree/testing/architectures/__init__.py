"""Other people's architectures, small and with random weights, and the page of what engines do with them."""
