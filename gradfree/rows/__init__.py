"""Rows: the equal blocks of an ``nn.Sequential`` as one autograd function, with all VJPs in one batch."""
