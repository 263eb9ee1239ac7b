"""`retrieval` is `ragkv.retrieval`: the same modules under a second name."""

from ragkv.runtime.second_name import give_second_name

give_second_name(__name__)
