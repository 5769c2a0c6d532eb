"""The families of drafters.

To add one, write a file here and a line in registry.py, or register an entry point in another
package.
"""
