"""The meaning of the model in NumPy float64; it knows no slice, rank, counter or bit pattern."""
