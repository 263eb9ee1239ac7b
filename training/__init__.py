"""How the bundled reader is made: worlds, tokenizer, training, evaluation, examples. Nothing in
`ragkv` imports it.
"""
