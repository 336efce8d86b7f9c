"""What the site needs and the theme does not do: small mends, each with its reason."""

ROLES = {"doc-biblioentry": "listitem"}  # docutils puts entries with this role into a role="list", which only takes listitem


def mend_body(app, pagename, templatename, context, doctree):
    body = context.get("body")
    if body:
        for wrong, right in ROLES.items():
            body = body.replace(f'role="{wrong}"', f'role="{right}"')
        context["body"] = body


def setup(app):
    app.connect("html-page-context", mend_body)
    return {"version": "1", "parallel_read_safe": True, "parallel_write_safe": True}
