// The way in: the part of the link behind the # is handed in once, for a cookie and a key of this origin.

import { enter, inside } from "./api.js";

const [link, meant] = location.hash.slice(1).split("~");
const path = location.pathname === "/enter" ? (/^\/[a-z]+\/[^/]+$/.test(meant || "") ? meant : "/") : location.pathname;
history.replaceState(null, "", location.pathname); // out of sight, and out of what is copied from the address bar

function say(title, text) {
  document.getElementById("title").textContent = title;
  document.getElementById("said").textContent = text;
}

try {
  if ((await inside()) || (link && (await enter(link)))) {
    location.replace(path);
  } else if (link) {
    say("This link is no longer good", "It was used, or is of an earlier run. Run `amends ui` again and open what it prints.");
  }
} catch (error) {
  say("Nobody answers", `The page could not be reached: ${error.message}`);
}
