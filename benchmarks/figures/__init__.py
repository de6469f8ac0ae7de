"""The pictures and tables of the documentation that no benchmark draws."""
