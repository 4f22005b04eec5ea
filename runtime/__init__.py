"""What agents may do: run steps that share one fate, and have what stands undone when that fate is bad.

An effect starts only after the fact that announces it is safe, and its outcome is one more fact. What is due next is
asked of the fold, in the process that began a saga and in the daemon that finishes it alike. What cannot be undone
safely is not guessed at; it goes to a named person.
"""
