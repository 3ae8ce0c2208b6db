"""One layer at a time against its meaning: every op and every sub-layer, on real weights."""
