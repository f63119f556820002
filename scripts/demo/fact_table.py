"""The embedded model's table of facts: its rows, and the wordings of questions about each column."""

from __future__ import annotations

# ---- facts: table -> (columns, prompts and answer by column, rows) ----------------------------------------------------

COUNTRY_ROWS = """
France|Paris|Europe|French|euro
Germany|Berlin|Europe|German|euro
Spain|Madrid|Europe|Spanish|euro
Italy|Rome|Europe|Italian|euro
Portugal|Lisbon|Europe|Portuguese|euro
Austria|Vienna|Europe|German|euro
Greece|Athens|Europe|Greek|euro
Finland|Helsinki|Europe|Finnish|euro
Norway|Oslo|Europe|Norwegian|krone
Sweden|Stockholm|Europe|Swedish|krona
Denmark|Copenhagen|Europe|Danish|krone
Poland|Warsaw|Europe|Polish|zloty
Hungary|Budapest|Europe|Hungarian|forint
Japan|Tokyo|Asia|Japanese|yen
China|Beijing|Asia|Chinese|yuan
South Korea|Seoul|Asia|Korean|won
Thailand|Bangkok|Asia|Thai|baht
Vietnam|Hanoi|Asia|Vietnamese|dong
Turkey|Ankara|Asia|Turkish|lira
Egypt|Cairo|Africa|Arabic|pound
Kenya|Nairobi|Africa|Swahili|shilling
Ghana|Accra|Africa|English|cedi
Brazil|Brasilia|South America|Portuguese|real
Argentina|Buenos Aires|South America|Spanish|peso
Peru|Lima|South America|Spanish|sol
Mexico|Mexico City|North America|Spanish|peso
Australia|Canberra|Oceania|English|dollar
"""
ELEMENT_ROWS = """
hydrogen|H|1
helium|He|2
lithium|Li|3
carbon|C|6
nitrogen|N|7
oxygen|O|8
fluorine|F|9
neon|Ne|10
sodium|Na|11
magnesium|Mg|12
aluminium|Al|13
silicon|Si|14
sulfur|S|16
chlorine|Cl|17
calcium|Ca|20
iron|Fe|26
copper|Cu|29
zinc|Zn|30
silver|Ag|47
gold|Au|79
"""
PLANET_ROWS = """
Mercury|first|rocky planet
Venus|second|rocky planet
Earth|third|rocky planet
Mars|fourth|rocky planet
Jupiter|fifth|gas giant
Saturn|sixth|gas giant
Uranus|seventh|ice giant
Neptune|eighth|ice giant
"""
# column -> (answer, prompts); {e} is the entity, {v} the value
FACT_COLUMNS: dict[str, tuple[str, tuple[str, ...]]] = {
    "capital": (
        "The capital of {e} is {v}.",
        (
            "What is the capital of {e}?", "Name the capital of {e}.", "Which city is the capital of {e}?", "capital of {e}",
            "What is {e}'s capital?", "What's the capital city of {e}?", "Tell me the capital of {e}.",
            "Do you know the capital of {e}?",
        ),
    ),
    "country": (
        "{v} is the capital of {e}.",
        (
            "{v} is the capital of which country?", "Which country has the capital {v}?", "What country is {v} the capital of?",
            "Whose capital is {v}?", "Name the country whose capital is {v}.", "Of which country is {v} the capital?",
        ),
    ),
    "continent": (
        "{e} is in {v}.",
        (
            "On which continent is {e}?", "Which continent is {e} in?", "Where is {e}?", "Name the continent of {e}.",
            "What continent is {e} on?", "continent of {e}", "In which part of the world is {e}?",
        ),
    ),
    "language": (
        "People in {e} speak {v}.",
        (
            "Which language is spoken in {e}?", "What language do people speak in {e}?", "What is the language of {e}?",
            "language of {e}", "Name the main language of {e}.", "What do they speak in {e}?", "Which language do I need in {e}?",
        ),
    ),
    "currency": (
        "The currency of {e} is the {v}.",
        (
            "What is the currency of {e}?", "Which currency is used in {e}?", "What money do they use in {e}?",
            "currency of {e}", "Name the currency of {e}.", "How do people pay in {e}?", "What is {e}'s currency?",
        ),
    ),
    "symbol": (
        "The symbol of {e} is {v}.",
        (
            "What is the symbol of {e}?", "What is the chemical symbol for {e}?", "symbol of {e}", "Name the symbol of {e}.",
            "Which symbol does {e} have?", "How is {e} written in the periodic table?", "What is {e}'s symbol?",
        ),
    ),
    "number": (
        "The atomic number of {e} is {v}.",
        (
            "What is the atomic number of {e}?", "Which atomic number does {e} have?", "atomic number of {e}",
            "Tell me the atomic number of {e}.", "What is {e}'s atomic number?", "How many protons does {e} have?",
            "What number is {e} in the periodic table?",
        ),
    ),
    "position": (
        "{e} is the {v} planet from the sun.",
        (
            "Which position from the sun does {e} have?", "Which planet from the sun is {e}?", "How far from the sun is {e}?",
            "Where in the solar system is {e}?", "What is the position of {e}?", "position of {e}",
            "Counting from the sun, which planet is {e}?",
        ),
    ),
    "type": (
        "{e} is a {v}.",
        (
            "What kind of planet is {e}?", "What type of planet is {e}?", "Is {e} rocky or a giant?", "Name the type of {e}.",
            "Which kind of planet is {e}?", "type of {e}", "What sort of planet is {e}?",
        ),
    ),
}  # fmt: skip


def _facts() -> tuple[tuple[str, str, str], ...]:
    """(column, entity, value) of every fact."""
    tables = (
        (COUNTRY_ROWS, ("capital", "continent", "language", "currency")),
        (ELEMENT_ROWS, ("symbol", "number")),
        (PLANET_ROWS, ("position", "type")),
    )
    facts = []
    for rows, columns in tables:
        for row in rows.strip().splitlines():
            entity, *values = row.split("|")
            facts += [(column, entity, value) for column, value in zip(columns, values, strict=True)]
    facts += [("country", entity, value) for column, entity, value in facts if column == "capital"]
    return tuple(facts)


FACTS = _facts()
