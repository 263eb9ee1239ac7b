"""The sentences and questions of a world: words and phrasings, no logic.

A relation links a subject of one kind to an object of one kind or to a plain word. Every relation has sentence and
question templates of three splits: those of training, variants that combine the same words differently, and held-out
ones with words that training never sees. `{s}` and `{o}` stand for the mentions of subject and object.

Invariant: the splits share no template.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Literal

from training.names import words

TemplateSplit = Literal["train", "variants", "heldout"]


@dataclass(frozen=True)
class Relation:
    """One fact a subject may have."""

    name: str
    subject: str  # "person", "company", "city", "event"
    object: str  # the kind of the object: one of the above, "country", "code" or a word list of WORDS
    train: tuple[str, ...]
    heldout: tuple[str, ...]
    questions: tuple[str, ...]
    heldout_questions: tuple[str, ...]
    follow_up: str  # asks for the object after a question that named the subject; {p}, {m} and {h} are its pronouns
    variants: tuple[str, ...] = ()  # the words of training, combined differently
    variant_questions: tuple[str, ...] = ()

    def sentences(self, split: TemplateSplit) -> tuple[str, ...]:
        """The sentence templates of one side of the split."""
        return {"train": self.train, "variants": self.variants, "heldout": self.heldout}[split]

    def asked(self, split: TemplateSplit) -> tuple[str, ...]:
        """The question templates of one side of the split."""
        return {"train": self.questions, "variants": self.variant_questions, "heldout": self.heldout_questions}[split]


WORDS: dict[str, tuple[str, ...]] = {
    "job": words(
        "baker teacher pilot doctor lawyer painter sailor tailor gardener librarian carpenter dentist potter weaver "
        "butcher judge clerk plumber printer singer dancer writer barber miller fisher hunter jeweller chemist"
    ),
    "hobby": words(
        "harp flute violin cello piano drums trumpet guitar banjo lute organ fiddle horn oboe bassoon tuba mandolin "
        "zither clarinet trombone bagpipes ukulele"
    ),
    "product": words(
        "lamps chairs boats clocks shoes pens radios cameras ovens ladders mirrors bicycles kettles hats tents knives "
        "candles carpets engines pumps bottles umbrellas blankets locks keys scales"
    ),
    "year": tuple(str(year) for year in range(1920, 1990)),
    "dish": words(
        "cheese honey bread soup wine beer plums cherries sausages mustard jam pickles cakes olives figs nuts pears "
        "trout salmon dumplings"
    ),
    "month": words("January February March April May June July August September October November December"),
}

RELATIONS: tuple[Relation, ...] = (
    Relation(
        "employer",
        "person",
        "company",
        (
            "{s} works for {o}.",
            "{o} employs {s}.",
            "{s} has a post at {o}.",
            "{s} is employed by {o}.",
            "{s} is on the staff of {o}.",
            "{o} hired {s}.",
            "{s} joined {o}.",
            "{s} has worked for {o} for years.",
            "The employer of {s} is {o}.",
            "At {o}, {s} has a post.",
            "The company that employs {s} is {o}.",
            "{o} is where {s} works.",
            "One of the staff of {o} is {s}.",
        ),
        ("{s} took a job with {o}.", "{s} is paid by {o}.", "{o} gave a post to {s}."),
        (
            "Which company employs {s}?",
            "For which company does {s} work?",
            "Who employs {s}?",
            "What company employs {s}?",
            "At which company does {s} work?",
            "Which company hired {s}?",
            "Who is the employer of {s}?",
            "For what company does {s} work?",
        ),
        ("At which company does {s} have a job?", "By which company is {s} employed?"),
        "And which company employs {m}?",
        variants=("{s} works at {o}.", "{o} has {s} on the staff."),
        variant_questions=("Which company does {s} work for?", "Who hired {s}?"),
    ),
    Relation(
        "job",
        "person",
        "job",
        (
            "{s} is a {o}.",
            "{s} works as a {o}.",
            "{s} is a {o} by trade.",
            "{s} trained as a {o}.",
            "{s} has been a {o} for years.",
            "The job of {s} is that of a {o}.",
            "{s} was trained as a {o}.",
            "{s} has the job of a {o}.",
            "{s} is employed as a {o}.",
            "By trade, {s} is a {o}.",
            "For a living, {s} works as a {o}.",
        ),
        ("{s} earns money as a {o}.", "The trade of {s} is that of a {o}.", "{s} is known as a good {o}."),
        (
            "What is the job of {s}?",
            "What does {s} do for a living?",
            "As what does {s} work?",
            "What job does {s} have?",
            "Which job does {s} have?",
            "As what is {s} employed?",
            "For a living, what does {s} do?",
            "As what was {s} trained?",
        ),
        ("What is the trade of {s}?", "What work does {s} do?"),
        "And what is {h} job?",
        variants=("{s} works as a {o} by trade.", "For years {s} has been a {o}."),
        variant_questions=("What does {s} work as?", "What is {s} by trade?"),
    ),
    Relation(
        "hobby",
        "person",
        "hobby",
        (
            "{s} plays the {o}.",
            "{s} is fond of the {o}.",
            "{s} is learning the {o}.",
            "{s} practises the {o} every week.",
            "The favourite instrument of {s} is the {o}.",
            "{s} owns an old {o}.",
            "{s} has played the {o} for years.",
            "{s} is learning to play the {o}.",
            "The {o} is what {s} plays.",
            "Every week, {s} practises the {o}.",
            "Of all instruments, {s} is most fond of the {o}.",
            "{s} owns and plays a {o}.",
        ),
        ("{s} took up the {o}.", "The instrument that {s} plays is the {o}.", "{s} likes to play the {o}."),
        (
            "Which instrument does {s} play?",
            "What does {s} play?",
            "What is the instrument of {s}?",
            "Of which instrument is {s} fond?",
            "Which instrument is {s} learning?",
            "What instrument is {s} fond of?",
            "Which instrument does {s} own?",
            "Which is the instrument of {s}?",
        ),
        ("On which instrument does {s} practise?", "What is the favourite instrument of {s}?"),
        "And which instrument does {p} play?",
        variants=("{s} practises the {o}.", "{s} plays an old {o}."),
        variant_questions=("What instrument does {s} play?", "Which is the favourite instrument of {s}?"),
    ),
    Relation(
        "home",
        "person",
        "city",
        (
            "{s} lives in {o}.",
            "{s} moved to {o}.",
            "{s} has a house in {o}.",
            "{s} settled in {o}.",
            "The home of {s} is in {o}.",
            "{s} rents a flat in {o}.",
            "{s} has lived in {o} for years.",
            "{o} is the home of {s}.",
            "The house of {s} stands in {o}.",
            "In {o}, {s} rents a flat.",
            "{o} is where {s} lives.",
            "The city where {s} lives is {o}.",
        ),
        ("{s} is at home in {o}.", "{s} bought a house in {o}.", "{s} lives near the centre of {o}."),
        (
            "In which city does {s} live?",
            "Where does {s} live?",
            "Where is the home of {s}?",
            "In what city does {s} live?",
            "Where has {s} settled?",
            "What is the home city of {s}?",
            "In which city is the house of {s}?",
            "To which city did {s} move?",
        ),
        ("Which city is the home of {s}?", "In which city does {s} have a house?"),
        "And in which city does {p} live?",
        variants=("{s} has a home in {o}.", "{s} lives in a flat in {o}."),
        variant_questions=("Which city does {s} live in?", "In which city is the home of {s}?"),
    ),
    Relation(
        "alias",
        "person",
        "code",
        (
            "{s} is also known as {o}.",
            "The code name of {s} is {o}.",
            "Friends call {s} by the name of {o}.",
            "{s} goes by the name of {o}.",
            "{s} signs letters as {o}.",
            "{s} has the code name {o}.",
            "{o} is the code name of {s}.",
            "{s} is known to friends as {o}.",
            "The name by which friends call {s} is {o}.",
            "{s} works under the name of {o}.",
        ),
        ("{s} is called {o} by friends.", "Letters of {s} are signed {o}.", "The other name of {s} is {o}."),
        (
            "What is the code name of {s}?",
            "By what other name is {s} known?",
            "Which code name does {s} have?",
            "What is {s} also known as?",
            "Under what name does {s} work?",
            "What code name does {s} go by?",
        ),
        ("What do friends call {s}?", "By what name does {s} go?"),
        "And what is {h} code name?",
        variants=("{s} is known as {o}.", "{s} goes by the code name of {o}."),
        variant_questions=("What is the other name of {s}?", "By what code name is {s} known?"),
    ),
    Relation(
        "seat",
        "company",
        "city",
        (
            "{s} is based in {o}.",
            "{s} has its head office in {o}.",
            "The head office of {s} is in {o}.",
            "{s} was set up in {o}.",
            "{s} runs a plant in {o}.",
            "{o} is the seat of {s}.",
            "{o} is where {s} is based.",
            "{o} is home to {s}.",
            "{s} has had its head office in {o} for years.",
            "In {o}, {s} runs a plant.",
            "The plant of {s} stands in {o}.",
            "The city where {s} is based is {o}.",
        ),
        ("{s} is at home in {o}.", "The seat of {s} is in {o}.", "{s} settled in {o}."),
        (
            "In which city is {s} based?",
            "Where is {s} based?",
            "Where is the head office of {s}?",
            "In what city is {s} based?",
            "Where does {s} have its head office?",
            "In which city does {s} run a plant?",
            "Where was {s} set up?",
            "Which city is home to {s}?",
        ),
        ("Which city is the seat of {s}?", "In which city is the head office of {s}?"),
        "And in which city is it based?",
        variants=("{s} has its seat in {o}.", "{s} runs its head office in {o}."),
        variant_questions=("Which city is {s} based in?", "In which city is the head office of {s} based?"),
    ),
    Relation(
        "product",
        "company",
        "product",
        (
            "{s} makes {o}.",
            "{s} is known for its {o}.",
            "The main product of {s} is {o}.",
            "{s} sells {o}.",
            "{s} builds {o}.",
            "{s} has made {o} for years.",
            "{s} has sold {o} for years.",
            "{s} is in the trade of making {o}.",
            "The product of {s} is {o}.",
            "{s} is proud of its {o}.",
            "Of all products, {s} is known most for {o}.",
            "{s} builds and sells {o}.",
        ),
        ("{s} lives by its {o}.", "{s} is a maker of {o}.", "{s} earns its money with {o}."),
        (
            "What does {s} make?",
            "What is the main product of {s}?",
            "What does {s} sell?",
            "What does {s} build?",
            "Which product does {s} sell?",
            "Which is the main product of {s}?",
            "Of which product is {s} proud?",
            "What has {s} made for years?",
        ),
        ("For which product is {s} known?", "Which product does {s} make?"),
        "And what does it make?",
        variants=("{s} makes and sells {o}.", "{s} is known for {o}."),
        variant_questions=("What product does {s} make?", "What is the product of {s}?"),
    ),
    Relation(
        "founded",
        "company",
        "year",
        (
            "{s} was founded in {o}.",
            "{s} opened its doors in {o}.",
            "The founding year of {s} is {o}.",
            "{s} has existed since {o}.",
            "{s} was started in {o}.",
            "{s} dates from {o}.",
            "{s} goes back to the year {o}.",
            "Since {o}, {s} has existed.",
            "The year in which {s} was founded is {o}.",
            "{s} has been at work since {o}.",
            "The doors of {s} opened in {o}.",
        ),
        ("{s} was set up in {o}.", "In {o}, {s} was founded.", "{s} began its work in {o}."),
        (
            "When was {s} founded?",
            "In which year was {s} founded?",
            "What is the founding year of {s}?",
            "What year was {s} founded?",
            "In what year was {s} founded?",
            "In which year did {s} open its doors?",
            "When did {s} open its doors?",
            "From which year does {s} date?",
        ),
        ("When was {s} started?", "Since when has {s} existed?"),
        "And when was it founded?",
        variants=("{s} was opened in {o}.", "{s} was founded and opened its doors in {o}."),
        variant_questions=("Which year was {s} founded in?", "In which year was {s} started?"),
    ),
    Relation(
        "country",
        "city",
        "country",
        (
            "{s} is a city in {o}.",
            "{s} lies in the north of {o}.",
            "{s} lies in {o}.",
            "{s} belongs to {o}.",
            "{s} is one of the old towns of {o}.",
            "{s} stands on the coast of {o}.",
            "{s} is a town in {o}.",
            "{s} is one of the cities of {o}.",
            "In {o} lies {s}.",
            "The country of {s} is {o}.",
            "{o} is the country where {s} lies.",
            "The city of {s} belongs to {o}.",
        ),
        ("{s} is in the south of {o}.", "{s} is an old city of {o}.", "{o} governs {s}."),
        (
            "In which country is {s}?",
            "To which country does {s} belong?",
            "In which country does {s} lie?",
            "In what country is {s}?",
            "What is the country of {s}?",
            "On the coast of which country does {s} stand?",
            "In what country does {s} lie?",
            "Which is the country of {s}?",
        ),
        ("Of which country is {s} a city?", "Which country does {s} belong to?"),
        "And in which country is it?",
        variants=("{s} is an old city in {o}.", "{s} stands in the north of {o}."),
        variant_questions=("Which country is {s} in?", "In which country is the city of {s}?"),
    ),
    Relation(
        "dish",
        "city",
        "dish",
        (
            "{s} is famous for its {o}.",
            "{s} is proud of its {o}.",
            "People visit {s} for the {o}.",
            "The {o} of {s} won a prize.",
            "{s} is the best place for {o}.",
            "Visitors travel to {s} for the {o}.",
            "The city of {s} is famous for its {o}.",
            "For its {o}, {s} is famous.",
            "Many people visit {s} for its {o}.",
            "{s} won a prize for its {o}.",
        ),
        ("The markets of {s} sell {o}.", "{s} is known all over for {o}.", "People like the {o} of {s}."),
        (
            "For what is {s} famous?",
            "What is {s} famous for?",
            "For what do people visit {s}?",
            "What do people visit {s} for?",
            "For what do visitors travel to {s}?",
            "What is the city of {s} famous for?",
            "For what is {s} the best place?",
            "For what did {s} win a prize?",
        ),
        ("Of what is {s} proud?", "What do people like in {s}?"),
        "And for what is it famous?",
        variants=("{s} is known for its {o}.", "{s} is the best place to visit for {o}."),
        variant_questions=("What is {s} proud of?", "For what is {s} known?"),
    ),
    Relation(
        "venue",
        "event",
        "city",
        (
            "{s} takes place in {o}.",
            "{s} is held in {o}.",
            "{o} is the host of {s}.",
            "{s} fills the streets of {o}.",
            "Visitors of {s} travel to {o}.",
            "The host of {s} is {o}.",
            "{o} is where {s} takes place.",
            "{s} has been held in {o} for years.",
            "Every year, {s} is held in {o}.",
            "The city of {s} is {o}.",
            "Visitors travel to {o} for {s}.",
        ),
        ("{s} is a feast of {o}.", "The place of {s} is {o}.", "{s} brings visitors to {o}."),
        (
            "In which city is {s} held?",
            "Where does {s} take place?",
            "Which city is the host of {s}?",
            "In what city is {s} held?",
            "Who is the host of {s}?",
            "To which city do visitors of {s} travel?",
            "What is the host city of {s}?",
            "What is the city of {s}?",
        ),
        ("In which city does {s} take place?", "Where is {s} held?"),
        "And in which city is it held?",
        variants=("{s} is held in the streets of {o}.", "{o} is the place of {s}."),
        variant_questions=("Which city does {s} take place in?", "Which is the host city of {s}?"),
    ),
    Relation(
        "month",
        "event",
        "month",
        (
            "{s} takes place in {o}.",
            "{s} is held every {o}.",
            "{s} starts in {o}.",
            "The date of {s} is in {o}.",
            "{s} opens in {o}.",
            "The month of {s} is {o}.",
            "Every {o}, {s} is held.",
            "{s} starts every {o}.",
            "{o} is the month when {s} opens.",
            "{s} has been held every {o} for years.",
        ),
        ("In {o}, {s} begins.", "{s} is a feast of {o}.", "{s} comes every year in {o}."),
        (
            "In which month is {s} held?",
            "In which month does {s} start?",
            "In what month is {s} held?",
            "What is the month of {s}?",
            "In which month does {s} open?",
            "When does {s} start?",
            "What is the date of {s}?",
        ),
        ("When in the year is {s} held?", "In which month does {s} take place?"),
        "And in which month is it held?",
        variants=("{s} opens every {o}.", "{s} is held in {o}."),
        variant_questions=("Which month is {s} held in?", "In which month is the date of {s}?"),
    ),
    Relation(
        "sponsor",
        "event",
        "company",
        (
            "{s} is paid for by {o}.",
            "{o} pays for {s}.",
            "{s} is a project of {o}.",
            "{o} is the sponsor of {s}.",
            "The sponsor of {s} is {o}.",
            "{o} has paid for {s} for years.",
            "{s} is one of the projects of {o}.",
            "{s} has {o} as its sponsor.",
            "One of the projects of {o} is {s}.",
        ),
        ("The money for {s} comes from {o}.", "{o} gave money for {s}."),
        (
            "Which company pays for {s}?",
            "Which company is the sponsor of {s}?",
            "What company pays for {s}?",
            "Of which company is {s} a project?",
            "What company is the sponsor of {s}?",
            "Which company has paid for {s}?",
            "Which is the sponsor of {s}?",
        ),
        ("By which company is {s} paid for?", "From which company does the money for {s} come?"),
        "And which company pays for it?",
        variants=("{s} is a project paid for by {o}.", "{o} is the company that pays for {s}."),
        variant_questions=("Who pays for {s}?", "Who is the sponsor of {s}?"),
    ),
)
BY_NAME: dict[str, Relation] = {relation.name: relation for relation in RELATIONS}

# How the answer of a first question is named inside a second one: "the employer of Talus".
ROLES: dict[str, str] = {
    "employer": "the employer of {s}",
    "home": "the home city of {s}",
    "seat": "the city of {s}",
    "venue": "the host city of {s}",
    "sponsor": "the sponsor of {s}",
}
SAME: dict[str, tuple[str, ...]] = {
    "company": ("the same company", "that company"),
    "city": ("the same city", "that city"),
}
THAT: dict[str, tuple[str, ...]] = {
    "company": ("that company", "this company", "the company"),
    "city": ("that city", "this city", "the city"),
    "event": ("that event", "this event", "the event"),
}
COMPARISON: dict[TemplateSplit, tuple[str, ...]] = {
    "train": (
        "Which company was founded earlier, {a} or {b}?",
        "Who was founded earlier, {a} or {b}?",
        "Which is older, {a} or {b}?",
        "Which one was founded earlier, {a} or {b}?",
        "Of the two, which is older, {a} or {b}?",
    ),
    "variants": ("Which was founded earlier, {a} or {b}?", "Who is older, {a} or {b}?"),
    "heldout": ("Which company is older, {a} or {b}?", "Who was started earlier, {a} or {b}?"),
}
LEADS = (
    "Today ",
    "By all accounts, ",
    "As far as we know, ",
    "For some time now, ",
    "According to the register, ",
    "As everyone knows, ",
    "In fact, ",
    "Once more: ",
)
FILLERS = (
    "The weather stayed mild until late autumn.",
    "Prices rose a little in the spring.",
    "Many reports were written on the matter.",
    "Critics were not impressed at first.",
    "The old road was closed for repairs.",
    "Nothing else was recorded at the time.",
    "A short film was made about it.",
    "Readers asked for more details later.",
    "The archive keeps a copy of this note.",
    "The markets were busy that week.",
    "Letters from friends were lost in the post.",
    "Visitors brought flowers and cakes.",
    "The feast went on all night.",
    "The place was quiet again by the next year.",
    "Some people like it, and others do not.",
    "A map of the centre hangs on the wall.",
    "No money comes from that source any more.",
    "The streets were empty in the south.",
    "Snow covered the coast for a week.",
    "The trade in wool was never large.",
    "Work began early and went on all day.",
    "The bridge was painted green.",
    "Nobody took notice of the news.",
    "The papers called it a good year.",
    "It rained on the day of the parade.",
    "A new school was planned but never built.",
    "The train was late as always.",
    "Two of the letters are signed and dated.",
    "The museum bought three old maps.",
    "Tea was served in the garden.",
    "The story was told in many ways.",
    "A dog slept in front of the door.",
)
SYSTEM = (
    "Answer from the documents.",
    "Answer in one word.",
    "You are a careful reader.",
    "Use only what the documents say.",
    "If the documents do not say, answer unknown.",
    "Read the notes and answer the question.",
)
