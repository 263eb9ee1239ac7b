"""Makes a model fast on a CPU: copies of its weights, chosen by measurement, and weights in eight
or four bits.
"""
