"""Linen modules: attention, feed-forward, norm and what they share."""
