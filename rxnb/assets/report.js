"use strict";
const $ = id => document.getElementById(id);
const el = (tag, cls, text) => { const e = document.createElement(tag); if (cls) e.className = cls; if (text !== undefined) e.textContent = text; return e; };

$("theme").addEventListener("click", () => {
  const root = document.documentElement;
  const dark = root.dataset.theme ? root.dataset.theme === "dark" : matchMedia("(prefers-color-scheme: dark)").matches;
  root.dataset.theme = dark ? "light" : "dark";
});

const unpack = async () => {
  const bytes = Uint8Array.from(atob($("items-data").textContent.trim()), c => c.charCodeAt(0));
  return JSON.parse(await new Response(new Blob([bytes]).stream().pipeThrough(new DecompressionStream("gzip"))).text());
};

// Everything below is put on the page as text, never as markup: a model wrote it.
const answer = (arm, a) => {
  const box = el("div", a.correct ? "right" : "wrong");
  const head = el("h4", "", `${arm}: ${a.correct ? "right" : "wrong"}`);
  box.append(head, a.text === null ? el("p", "soft", "The text of this answer was not kept with its row.") : el("pre", "", a.text));
  const foot = el("div", "soft", `extracted ${a.extracted === null ? "nothing" : a.extracted}; ${a.reason}; ended by ${a.stop_reason}; ${a.completion_tokens} tokens; `);
  const link = el("a", "n", `row ${a.row}`);
  link.href = `${a.file}#L${a.row}`;
  foot.append(link);
  box.append(foot);
  return box;
};

const card = (item, arms) => {
  const box = el("article", "item");
  box.append(el("h3", "", item.id), el("pre", "", item.question === null ? "(the question was not kept)" : item.question), el("p", "soft", `gold: ${item.gold}`));
  const all = el("div", "answers");
  for (const arm of arms) all.append(answer(arm, item.arms[arm]));
  box.append(all);
  return box;
};

const start = items => {
  const page = 25;
  let shown = page;
  const kinds = { discordant: (x, y) => x !== y, only_a: (x, y) => x && !y, only_b: (x, y) => !x && y, both: (x, y) => x && y, neither: (x, y) => !x && !y, all: () => true };
  const draw = () => {
    const [a, b, kind, words] = [$("arm-a").value, $("arm-b").value, $("kind").value, $("words").value.toLowerCase()];
    const right = (i, arm) => Boolean(i.arms[arm].correct);
    const count = f => items.filter(i => f(right(i, a), right(i, b))).length;
    for (const k of ["both", "only_a", "only_b", "neither"]) $(`n-${k}`).textContent = count(kinds[k]);
    for (const e of document.querySelectorAll(".name-a")) e.textContent = a;
    for (const e of document.querySelectorAll(".name-b")) e.textContent = b;
    $("n-right-a").textContent = count(x => x); $("n-wrong-a").textContent = count(x => !x);
    $("n-right-b").textContent = count((x, y) => y); $("n-wrong-b").textContent = count((x, y) => !y);
    const has = i => !words || [i.id, i.question, i.gold, i.arms[a].text, i.arms[b].text].some(t => String(t ?? "").toLowerCase().includes(words));
    const found = items.filter(i => kinds[kind](right(i, a), right(i, b)) && has(i));
    $("count").textContent = `${found.length} of ${items.length} items` + (found.length > shown ? `, the first ${shown} shown` : "");
    $("cards").replaceChildren(...found.slice(0, shown).map(i => card(i, a === b ? [a] : [a, b])));
    $("more").hidden = found.length <= shown;
  };
  for (const id of ["arm-a", "arm-b", "kind", "words"]) $(id).addEventListener("input", () => { shown = page; draw(); });
  $("more").addEventListener("click", () => { shown += page; draw(); });
  draw();
  document.documentElement.dataset.ready = "yes";
};

if ($("items-data")) unpack().then(start);
else document.documentElement.dataset.ready = "yes";
