"""Text for the gate: twelve passages about the same people and places; each refers to those before
it.
"""

from collections.abc import Sequence

from ragkv.lab.gate import Probe
from ragkv.types import Chunk

PASSAGES = (
    "Marta Lindqvist was born in Osby and moved to Hallvik when she was nine. She works for "
    "Norrland Timber, a company "
    "that was founded in 1921. The company has its head office in the same town. She lives near "
    "the harbour.",
    "Her brother Jonas trained as a carpenter. He works for the same company as his sister, but "
    "he lives in Osby. "
    "Every week he takes the train to Hallvik, where he plays chess with an old friend. He is "
    "called Peder Holm.",
    "Peder Holm is a doctor. He has worked at the hospital in that town for twenty years. His "
    "wife Agnes runs a small "
    "firm that makes lamps. It was founded in 1998, and its workshop lies behind the church.",
    "The hospital stands on a hill above the river. It was built in 1934 and has two hundred "
    "beds. The old building "
    "was closed for repairs last year. Until it opens again, the doctors work in the school on "
    "Market Street.",
    "Market Street is the oldest street of the town. The baker, the bank and the office of "
    "Norrland Timber are all "
    "there. Agnes sells her lamps in a shop next to the bank. She says that most of them are "
    "bought by visitors.",
    "Visitors come for the Harbour Festival, which is held every June. It began in 1962 with "
    "three boats and a band. "
    "Last year forty boats took part. Jonas built one of them himself, and his sister painted it "
    "blue.",
    "The blue boat is called Sparrow. It came second in the race around the island. The boat "
    "that came first belongs "
    "to a teacher from Osby, Karin Dahl. She had bought it from Peder the year before.",
    "Karin Dahl teaches history at the school in Osby. She wrote a book about the railway "
    "between the two towns. In it "
    "she shows that the company paid for half of the line. The book was printed in 2007 and is "
    "still on sale.",
    "The railway was opened in 1925, four years after the company was founded. At first it "
    "carried only timber. The "
    "first passengers were workers, who paid nothing. A ticket cost two crowns when the line was "
    "opened to everyone.",
    "The director of the company in those years was Erik Norrland. He was known as the Pike. His "
    "house stands opposite "
    "the station, and his granddaughter still lives in it. She is the mayor of Hallvik.",
    "The mayor wants to build a bridge to the island. Peder and his wife are against it, since "
    "the road would pass "
    "behind the church. Karin is for it. The council will decide in the spring, when the "
    "hospital has opened again.",
    "In the spring the council met three times. At the last meeting the director of the bank "
    "promised to lend the "
    "money. Marta, who had joined the council that year, asked him what would happen to the "
    "ferry. He did not know.",
)


def windows(chunks: Sequence[Sequence[int]]) -> list[Probe]:
    """Prompts of five consecutive chunks, given as token ids; the next one is the question and what
    follows it.
    """
    ring = [Chunk(tuple(ids)) for ids in chunks]
    size = min(5, len(chunks) - 1)
    ring += ring[:size]
    return [Probe.of(ring[at : at + size], ring[at + size].token_ids) for at in range(len(chunks))]
