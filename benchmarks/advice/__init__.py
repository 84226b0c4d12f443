"""``gradfree advise``: engines are timed on the user's model within a budget, and one is recommended."""
