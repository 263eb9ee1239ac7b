"""What makes a model fast on a CPU: copies of weights, and attention as products, chosen by measuring."""
