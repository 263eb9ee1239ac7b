"""A tenant's documents: collections, uploads and how they are parsed, and deletions that every
replica follows.
"""
