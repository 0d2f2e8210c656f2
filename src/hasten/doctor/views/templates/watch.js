// Asks for the page's body once a second and replaces what has changed, so that a place scrolled to, a section opened
// and text selected stay as they are.
"use strict";

const every = 1000;
const main = document.querySelector("main");
const state = document.getElementById("watch-state");

function parts(element) {
  return Array.from(element.children);
}

function update(html) {
  const fresh = new DOMParser().parseFromString(html, "text/html").body;
  const now = parts(main), next = parts(fresh);
  if (now.length !== next.length) {
    main.replaceChildren(...next);
    return;
  }
  next.forEach((part, index) => {
    const old = now[index];
    if (old.outerHTML === part.outerHTML) return;
    const open = Array.from(old.querySelectorAll("details")).map((one) => one.open);
    part.querySelectorAll("details").forEach((one, n) => { if (open[n]) one.open = true; });
    old.replaceWith(part);
  });
}

async function look() {
  try {
    const answer = await fetch("/body", { cache: "no-store" });
    const text = await answer.text();
    if (answer.ok) {
      update(text);
      state.textContent = "live";
      state.className = "live";
    } else {
      state.textContent = text.trim();
      state.className = "lost";
    }
  } catch {
    state.textContent = "hasten watch has ended; this is the last it showed";
    state.className = "lost";
  }
  setTimeout(look, document.hidden ? 5 * every : every);
}

setTimeout(look, every);
