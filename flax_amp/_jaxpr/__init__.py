"""Jaxprs: facts about primitives, a walk over equations, an interpreter."""
