"""Rows: the equal blocks of an ``nn.Sequential`` as one autograd function, pulled through in one batch."""
