"""HTTP as headrace uses it: a server, a client, and plain exchanges for what is called most."""
