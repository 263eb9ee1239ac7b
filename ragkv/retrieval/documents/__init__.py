"""From files to documents: one loader for each format. They know nothing of splitting or
indexes.
"""
