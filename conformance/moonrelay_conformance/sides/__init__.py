"""Processes of producers and consumers: the runner inside, the handle outside, and what can be observed of them."""
