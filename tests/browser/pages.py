"""What a user does in Airflow's UI, by the names that a user sees. Every wait is for something visible."""

from __future__ import annotations

import re

from playwright.sync_api import Locator, Page, expect


def log_in(page: Page, url: str, user: str, password: str) -> None:
    """Logs in; returns when Airflow has let the user in."""
    try_to_log_in(page, url, user, password)
    page.wait_for_url(lambda where: "/auth/login" not in where)


def try_to_log_in(page: Page, url: str, user: str, password: str) -> None:
    """Fills in the login form and sends it."""
    page.goto(f"{url}/auth/login/")
    page.locator("input[name=username]").fill(user)
    page.locator("input[name=password]").fill(password)
    page.locator("button[type=submit]").click()


def open_dag(page: Page, url: str, dag_id: str) -> None:
    """The DAG's page, loaded."""
    page.goto(f"{url}/dags/{dag_id}")
    expect(page.get_by_role("heading", name=dag_id)).to_be_visible()


def show_graph(page: Page) -> dict[str, float]:
    """Switches to the graph; for each task the place of its box, from left to right, once all are drawn."""
    page.get_by_role("button", name="Show Graph").click()
    boxes = page.locator(".react-flow__node")
    expect(boxes.first).to_be_visible()
    page.wait_for_function("document.querySelectorAll('.react-flow__node').length >= 7")
    return dict(boxes.evaluate_all("all => all.map(box => [box.dataset.id, box.getBoundingClientRect().x])"))


class TriggerForm:
    """The dialog behind the button *Trigger*."""

    def __init__(self, page: Page) -> None:
        page.get_by_role("button", name="Trigger").first.click()
        self.dialog = page.get_by_role("dialog")
        expect(self.section("Run")).to_be_visible()

    def section(self, title: str) -> Locator:
        """The header of a section; a click opens it."""
        return self.dialog.get_by_role("button", name=title, exact=True)

    def field(self, name: str) -> Locator:
        """The input of a run parameter."""
        return self.dialog.locator(f"[name=element_{name}]")

    def choose(self, name: str, text: str) -> None:
        """Picks an entry of a drop-down field."""
        self.dialog.locator(f"#element_{name}").click()
        self.dialog.get_by_role("option", name=text, exact=True).click()
        expect(self.field(name)).to_have_value(text)

    def switch_on(self, name: str) -> None:
        """Turns a switch on."""
        box = self.field(name)
        box.locator("xpath=ancestor::label[1]").click()
        expect(box).to_be_checked()

    @property
    def button(self) -> Locator:
        """The button that starts the run."""
        return self.dialog.get_by_role("button", name=re.compile("^Trigger$"))
