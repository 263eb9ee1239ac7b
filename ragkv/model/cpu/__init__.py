"""What makes a model fast on a CPU: copies of its weights, chosen by measuring, and weights in
eight or four bits.
"""
