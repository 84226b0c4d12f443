"""``gradfree.scan``: any step function over a sequence, in segments that run at once on autograd's own graph."""
