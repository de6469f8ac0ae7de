"""Forms drawn: the block matrix (`spy`), the blocks and what feeds them (`diagram`), and in words (`summary`)."""
