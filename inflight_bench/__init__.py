"""A load generator for servers that speak OpenAI's protocol: what it sends, when it sends it, and how long the answers take.

It is a client: it measures any server from outside, and needs neither torch nor the engine. Its command is
`inflight bench serve`.
"""
